"""What goes wrong in a lab, and how it is told.

NetlabError
|-- BadRequestError    what was asked for makes no sense; nothing was changed
|-- CommandError       a program of the system failed or did not end in time
|-- HelperError        a process of the lab does not start or does not answer
|-- LabExistsError     that name is taken, by a lab in use or by leftovers of one
|-- NoLabError         there is no lab of that name
`-- UnsupportedError   this machine cannot run a lab; every reason is listed
"""

from __future__ import annotations


class NetlabError(Exception):
    """Anything that a lab reports."""


class BadRequestError(NetlabError, ValueError):
    """What was asked for makes no sense; nothing was changed."""


class CommandError(NetlabError):
    """A program of the system failed or did not end in time."""


class HelperError(NetlabError):
    """A process of the lab does not start or does not answer."""


class LabExistsError(NetlabError):
    """That name is taken, by a lab in use or by leftovers of one."""


class NoLabError(NetlabError):
    """There is no lab of that name."""


class UnsupportedError(NetlabError):
    """This machine cannot run a lab; every reason is listed."""
