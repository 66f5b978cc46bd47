"""The requests that are sent, how they are sent, and the figures of what comes back."""
