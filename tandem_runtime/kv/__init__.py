"""What do all parties of a KV hand-over share: layouts, MACs, regions, and the client of the KV service?"""
