"""A cache of examples by index: in memory, or in a folder that all processes of a host share.

steps before ──► cached? ──yes──► a copy ──► steps after
                   │ no                 ▲
                   └──► computed, added ┘
"""
