"""What was made of examples is kept, by index: in memory, or in a folder that all processes of a host share.

steps before ──► Cache: has it? ──yes──► a copy ──► steps behind
                   │ no                     ▲
                   └──► made, kept ─────────┘
"""

__all__: list[str] = []
