"""The encode worker: texts in, embeddings, classes or rankings out."""
