"""Training in several processes: process group, collectives, rendezvous."""
