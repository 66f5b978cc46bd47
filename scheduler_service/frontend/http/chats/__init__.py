"""Parts of chats that several HTTP APIs share."""
