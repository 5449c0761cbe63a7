package netconf

import "strings"

// Shorten cuts a text to at most n bytes, at a rune boundary, and marks the cut with "…".
func Shorten(s string, n int) string {
	if len(s) <= n {
		return s
	}
	if n < len("…") {
		return ""
	}
	return strings.ToValidUTF8(s[:n-len("…")], "") + "…"
}
