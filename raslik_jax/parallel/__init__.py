"""Meshes of devices, and several processes that run one program."""
