"""One module per subcommand of `crossrank`."""
