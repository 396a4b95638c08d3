"""viiwork: a few GPU machines that act as one OpenAI-compatible endpoint."""
