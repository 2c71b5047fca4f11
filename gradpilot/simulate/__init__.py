"""Jobs that exist only as numbers: how policies do on networks that change.

No torch and no gRPC: what trainings showed was recorded once and lies in ``recorded.json``.
"""
