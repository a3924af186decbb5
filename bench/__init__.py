"""Measurements that can be repeated: each prints one JSON line."""
