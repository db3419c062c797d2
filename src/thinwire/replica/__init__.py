"""What a strategy sees: one worker's flat vectors, named state and messages in flight."""
