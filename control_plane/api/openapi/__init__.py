"""What does this server answer, in a form that machines and people can read?"""
