"""The contract between the portal and its nodes: every message that crosses, and nothing else."""
