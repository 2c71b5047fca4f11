"""The contract between agents, controller and operators.

``messages`` holds the frozen dataclasses that the rest of the code sees; ``codec`` is the only
importer of the generated protobuf classes; ``v1`` holds the ``.proto`` files and what was generated
from them.
"""
