#!/bin/sh
# usage: check_symbols.sh NM LIBRARY -- every symbol that the library exports begins with tw_.
set -eu
symbols=$("$1" -D --defined-only "$2" | awk '{print $3}' | sed 's/@.*//')
foreign=$(echo "$symbols" | grep -v '^tw_' | grep -v '^TILEWISE_' || true)
if [ -n "$foreign" ]; then
  echo "exported, but not tw_:"
  echo "$foreign"
  exit 1
fi
count=$(echo "$symbols" | grep -c '^tw_')
echo "$count symbols, all tw_"
[ "$count" -ge 20 ]
