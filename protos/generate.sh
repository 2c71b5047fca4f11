#!/usr/bin/env bash
# Generates protos/v1/*_pb2* from protos/v1/*.proto with the tools of protos/tools.txt.
#
#   protos/generate.sh           rewrite the files that differ
#   protos/generate.sh --check   print the differences; exit 1 if there are any, 3 without tools
#
# The tools live in .venv-protos, which is made when it is missing or when tools.txt changed.
set -euo pipefail

check=false
case "${1-}" in
    "") ;;
    --check) check=true ;;
    *)
        echo "generate.sh: expected no argument or --check, got '$1'" >&2
        exit 2
        ;;
esac

cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
venv=.venv-protos
# Status 3, so that a caller can tell "no tools" from "out of date".
if ! cmp -s protos/tools.txt "$venv/tools.txt"; then
    rm -rf "$venv"
    if ! { "${PYTHON:-python3}" -m venv "$venv" &&
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
            --requirement protos/tools.txt; }; then
        echo "generate.sh: cannot make $venv; it needs a package index with protos/tools.txt" >&2
        exit 3
    fi
    cp protos/tools.txt "$venv/tools.txt" # last: a venv without it is made again
fi

new=$(mktemp -d)
trap 'rm -rf "$new"' EXIT
# -I. and the link gradpilot/protos make imports come out as `from gradpilot.protos.v1 import`.
PATH="$PWD/$venv/bin:$PATH" "$venv/bin/python" -m grpc_tools.protoc -I. \
    --python_out="$new" --grpc_python_out="$new" \
    --mypy_out=quiet:"$new" --mypy_grpc_out=quiet:"$new" gradpilot/protos/v1/*.proto
made=$new/gradpilot/protos/v1
for proto in protos/v1/*.proto; do # a file of messages only gets an empty _pb2_grpc
    if ! grep -q '^service ' "$proto"; then
        rm -f "$made/$(basename "$proto" .proto)"_pb2_grpc.py*
    fi
done

if $check; then
    mkdir "$new/committed"
    find protos/v1 -maxdepth 1 -name '*_pb2*.py*' -exec cp {} "$new/committed" \;
    if ! (cd "$new" && diff -ru committed gradpilot/protos/v1); then
        echo "generate.sh: protos/v1 is out of date; run protos/generate.sh and commit" >&2
        exit 1
    fi
else
    for old in protos/v1/*_pb2*.py*; do
        [ -e "$made/$(basename "$old")" ] || rm -f "$old"
    done
    for file in "$made"/*; do
        cmp -s "$file" "protos/v1/$(basename "$file")" || cp "$file" protos/v1/
    done
fi
