"""In how few bytes: vectors to payloads and back."""
