"""What do the services believe they hold, and where do they contradict each other?"""
