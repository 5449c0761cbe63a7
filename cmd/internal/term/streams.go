package term

import "io"

// Streams are the standard input, output and error output of a command.
type Streams struct {
	In       io.Reader
	Out, Err io.Writer
}
