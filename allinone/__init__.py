"""The whole portal on one machine: starts the servers and the planes as processes, watches them, and ends them."""
