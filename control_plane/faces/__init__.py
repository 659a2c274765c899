"""How does each kind of client see Tandem: OpenAI, Cloudflare's REST, workerd's binding, an operator?"""
