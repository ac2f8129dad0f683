"""Text to tokens and back, and chats to text."""
