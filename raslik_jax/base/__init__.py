"""What every room may use: settings, files and messages. This room computes nothing."""
