"""How do models call tools, each family in its own form, and how do clients learn of it in one?"""
