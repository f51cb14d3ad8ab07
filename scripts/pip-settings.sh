# To be read by other scripts: pip's own settings for uv, and folders of packages beside .venv.

lend_pip_settings() {  # uv reads its own configuration; where that names no index, pip's is used
  pip_setting() { .venv/bin/python -m pip config get "$1" 2>/dev/null || true; }
  index=${PIP_INDEX_URL:-$(pip_setting global.index-url)}
  extra=${PIP_EXTRA_INDEX_URL:-$(pip_setting global.extra-index-url)}
  links=${PIP_FIND_LINKS:-$(pip_setting global.find-links)}
  cert=${PIP_CERT:-$(pip_setting global.cert)}
  if [ -n "$index" ] && [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}${UV_CONFIG_FILE:-}" ]; then export UV_DEFAULT_INDEX="$index"; fi
  if [ -n "$extra" ] && [ -z "${UV_INDEX:-}${UV_EXTRA_INDEX_URL:-}" ]; then export UV_INDEX="$extra"; fi
  if [ -n "$links" ] && [ -z "${UV_FIND_LINKS:-}" ]; then UV_FIND_LINKS=$(printf '%s' "$links" | tr -s ' \n' ','); export UV_FIND_LINKS; fi
  if [ -n "$cert" ] && [ -z "${SSL_CERT_FILE:-}" ]; then export SSL_CERT_FILE="$cert"; fi
}

packages_in() {  # packages_in FOLDER SCRIPT OPTION…: uv installs into FOLDER; a stamp remembers by which SCRIPT: a second call only looks
  folder=$1 made_from=$(cksum <"$2")
  shift 2
  if [ "$(cat "$folder/tritium-stamp" 2>/dev/null)" != "$made_from" ]; then
    lend_pip_settings
    rm -rf "$folder"
    .venv/bin/uv pip install --quiet --python .venv/bin/python --target "$folder" "$@" >&2
    echo "$made_from" >"$folder/tritium-stamp"
  fi
}
