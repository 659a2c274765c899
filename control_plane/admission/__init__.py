"""Decides which waiting request of a model is next, and which worker is expected to have room for it.

No module here knows a clock, an event loop, gRPC or an unseeded random: `now` is an argument, in monotonic seconds. The
gateway calls them from `control_plane/dispatch`, a simulator from its own virtual time.
"""
