"""The door for applications: an OpenAI-compatible server that captures what is said and switches adapters live."""
