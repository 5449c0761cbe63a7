//go:build !race

package sandbox

// Raced says whether this program has the race detector.
const Raced = false
