"""The documents' figures, made from the result files: ``python -m bench.report [--check]``.

No figure in docs/benchmarks.md is typed: prose is written by people in ``sections/``, one file for
each benchmark, with a named place, ``{like_this}``, wherever a figure stands, and the document is
what comes out when ``bench/results/*.json`` has been put in. Templates, rather than marked blocks
inside the document, because most figures stand in the middle of sentences, where marks would make
the document unreadable; and beside the code that fills them, so that a place and its meaning are in
one file. README.md, docs/claims.md and docs/netlab.md are written by hand but for one part each,
which stands between two marks and is put in place there.

To add a benchmark, add a file to ``sections/`` (``chaos.py`` is the shortest) and run
``make report``. After a new measurement run it, too; it says where the words no longer fit.

* ``results``: a result file and questions to it
* ``section``: a section, its places, what it claims in words, and why targets were missed
* ``documents``: which documents there are, and what belongs into them
* ``sections``: the sections
* ``headlines``, ``claims_table``, ``netlab_table``: the parts of other documents
"""
