package sandbox

import "os"

// longEnv is the environment variable that lets tests run in full.
const longEnv = "UNWIND_TEST_LONG"

// Long says whether tests run in full, as in make proof. A normal run, make test, has fewer rounds, and
// of a matrix the cases that Sampled takes.
func Long() bool { return os.Getenv(longEnv) != "" }

// Sampled says whether a case of a matrix is one that this run has. A normal run has one in so many, so
// that each value of each dimension meets each of another; a long one has all. The indexes are those of
// the case in each dimension.
func Sampled(oneIn int, indexes ...int) bool {
	sum := 0
	for _, i := range indexes {
		sum += i
	}
	return Long() || sum%oneIn == 0
}
