"""The command `hvd-compress`: what one does before, during and after a run. One file per subcommand."""
