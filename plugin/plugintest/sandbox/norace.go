//go:build !race

package sandbox

// Raced reports whether this program was built with the race detector.
const Raced = false
