"""Running gracestream: container images, Kubernetes, monitoring, and the local stack of `gracestream up`."""
