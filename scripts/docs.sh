#!/usr/bin/env bash
# Builds the documentation as a site into runs/site and checks every link. MkDocs is installed once, in an environment of its
# own (runs/docs-venv, 170 MB).
#
#     scripts/docs.sh            build; open runs/site/index.html
#     scripts/docs.sh --serve    show it at http://127.0.0.1:8000 and follow changes
#
# Exit code 3: MkDocs could not be installed, so nothing was built.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case "$*" in
"" | --serve) ;;
*)
    echo "docs.sh: unknown arguments '$*'; it takes --serve or nothing" >&2
    exit 2
    ;;
esac

environment=runs/docs-venv
if ! [ -e "$environment/made" ]; then
    echo "Making $environment"
    "${PYTHON:-python3}" -m venv "$environment"
    "$environment/bin/pip" install --quiet --disable-pip-version-check \
        mkdocs==1.6.1 mkdocs-material==9.8.2 'mkdocstrings[python]==1.0.8' ||
        { echo "docs.sh: MkDocs could not be installed" >&2 && exit 3; }
    touch "$environment/made"
fi
export NO_MKDOCS_2_WARNING=1 # an advertisement
if [ "$*" = --serve ]; then
    exec "$environment/bin/mkdocs" serve
fi
exec "$environment/bin/mkdocs" build --strict --quiet
