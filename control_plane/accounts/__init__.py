"""Who may call, how much, and what did they use?"""
