"""Settings, files and messages for every room. This room computes nothing."""
