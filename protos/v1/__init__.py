"""The protocol as ``.proto`` files, and the classes that ``protos/generate.sh`` made from them."""
