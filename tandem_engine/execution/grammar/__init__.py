"""Which tokens does a grammar let an answer go on with?"""
