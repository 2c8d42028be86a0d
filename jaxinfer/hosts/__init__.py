"""One model on many hosts: one process schedules and serves, the others make the same device calls.

    meeting     how they find each other, and whether they belong together
    facts       what has to be equal on all hosts: code and model
    channel     messages between the processes, and who of them is still there
    leader      a runner that tells the others what it is about to call
    follower    makes the calls that it is told of

Every process holds a part of the weights and of the cache, and each program runs on all of them at
once. What a program is given by a host is small: the packed metadata of a step. Process 0 sends it
as it is, so the others have neither scheduler nor requests, and nothing that could differ.
"""

from jaxinfer.hosts.channel import Follower, Leader
from jaxinfer.hosts.follower import replay
from jaxinfer.hosts.leader import LeadingEngine, LeadingRunner
from jaxinfer.hosts.meeting import join

__all__ = ["Follower", "Leader", "LeadingEngine", "LeadingRunner", "join", "replay"]
