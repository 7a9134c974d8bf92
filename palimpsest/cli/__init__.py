"""The command line: one module per verb. The only place that reads arguments and prints."""
