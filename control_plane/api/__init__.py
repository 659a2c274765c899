"""How clients reach Tandem: OpenAI, Workers AI REST, the binding of workerd, and the administration."""
