package sandbox

import "os"

// length is the environment variable with the length of a run: nothing for make test, "matrix" for make
// matrix, and anything else for make proof.
const length = "UNWIND_TEST_LONG"

// Long says whether tests run in full, as in make proof.
func Long() bool { return Rounds(0, 0, 1) == 1 }

// Rounds returns the number for this run: that of make test, of make matrix, or of make proof.
func Rounds(test, matrix, proof int) int {
	switch os.Getenv(length) {
	case "":
		return test
	case "matrix":
		return matrix
	}
	return proof
}

// Sampled says whether a case of a matrix is one in so many, so that each value of each dimension meets
// each of another. The indexes are those of the case in each dimension.
func Sampled(oneIn int, indexes ...int) bool {
	sum := 0
	for _, i := range indexes {
		sum += i
	}
	return sum%oneIn == 0
}
