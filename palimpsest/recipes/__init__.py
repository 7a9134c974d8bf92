"""One model, one file: geometry from a config, tensor names, program. Imports neither torch nor numpy."""
