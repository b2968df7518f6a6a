"""One module per input format; each yields typed rows."""
