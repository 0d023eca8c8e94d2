"""Settings, files, messages and progress: what every room may use. It computes nothing."""
