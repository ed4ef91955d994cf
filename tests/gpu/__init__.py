"""Whether gracestream works on this GPU: `make gpu`."""
