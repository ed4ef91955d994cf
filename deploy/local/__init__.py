"""The local stack: a real Kafka and a real Valkey as child processes, or existing ones, or containers."""
