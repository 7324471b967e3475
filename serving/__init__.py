"""The HTTP service: a Litestar app around a lorajax engine that any OpenAI client can use."""
