"""Meshes of devices and jobs of several processes."""
