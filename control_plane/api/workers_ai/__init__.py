"""Workers AI's endpoints: REST, the binding, the remote proxy and the model search."""
