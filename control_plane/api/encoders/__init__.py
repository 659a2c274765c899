"""Embeddings, rankings and classes: OpenAI's and Cohere's endpoints, and Workers AI's inputs."""
