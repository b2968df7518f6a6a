"""What a stranger's file tries to do to whoever reads it, as a user would meet it: by the command."""
